"""Schedules: a folder's documents and a file's questions, submitted again and again.

Every worker tries every occurrence whose files it can see; a unique row decides who submits it.
"""
