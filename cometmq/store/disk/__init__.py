"""Files by offset: the seam to the file system, and rows of files of one size."""
