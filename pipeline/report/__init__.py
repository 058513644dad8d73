"""Answers as people and programs take them: a table on the screen, CSV and JSONL files, a closing summary."""
