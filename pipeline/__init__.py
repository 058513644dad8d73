"""What people touch: the command line, documents, question sets, submission and reports."""
