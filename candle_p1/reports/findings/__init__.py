"""What the records show, in sentences: each is made from numbers of a table, or not at all."""
