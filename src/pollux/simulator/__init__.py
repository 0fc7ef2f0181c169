"""A virtual world for the scheduler. So far only the reader of measured traces; the rest comes with the next issue."""
