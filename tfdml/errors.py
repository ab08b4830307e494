"""The error that the command line shows as one line."""


class UserError(ValueError):
    """Something that the user can mend: a path, a file, a flag, a value.

    The message says what was wrong, where, and what to do about it. The commands in `bin/` print it as one
    line without a traceback and exit with a status that is not 0; from Python it is a plain `ValueError`.
    """
