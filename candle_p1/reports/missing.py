"""What a report cannot show because the records lack the data."""


class MissingDataError(Exception):
    """The records lack what a figure or a statement needs; the message says what."""
