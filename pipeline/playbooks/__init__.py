"""Playbooks: question sets with answer types, guidance, includes and variables; what ships with Platemaker."""
