"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """Bad input. The message is one sentence: what is wrong, the numbers, the nearest thing
    that works. The command line prints it without a traceback and exits with code 2."""
