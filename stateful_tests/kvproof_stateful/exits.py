"""How a command ends: exit codes, and errors that are one line."""

from __future__ import annotations

EXIT_CLEAN, EXIT_VIOLATION, EXIT_USAGE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class CommandFailed(Exception):
    """Ends the command with one line and an exit code."""

    exit_code = EXIT_FAILED


class UsageError(CommandFailed):
    """What was asked for cannot be done; the message says what can."""

    exit_code = EXIT_USAGE
