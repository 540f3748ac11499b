"""The one exception whose message is meant for the user."""


class UserError(ValueError):
    """Something the user can put right; the message is one sentence that names the field or file at fault.

    A ValueError, so that those who call the library without knowing of this class can treat it as one.
    """
