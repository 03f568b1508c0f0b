"""How the end of a rank, of a launcher or of a node ends the job, and how the record says so."""
