"""What was done, what it cost, and whether the split pays: from the rows, and from measuring."""
