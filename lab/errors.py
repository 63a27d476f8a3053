"""The one exception the lab raises on purpose."""


class LabError(Exception):
    """Something a person has to know: one sentence with what, where and the thing to do."""
