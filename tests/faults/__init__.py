"""Whole runs in which something goes wrong, on every host: what each rank says, when all have ended, what is left."""
