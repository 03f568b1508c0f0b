"""What a run leaves behind: the record's types, reading and writing, and the environment."""
