"""What the records show, in sentences: each made from numbers that a table shows, or refused."""
