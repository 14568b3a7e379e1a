"""Campaigns, targets, reports and the command line: the specification put to use."""
