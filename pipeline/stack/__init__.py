"""`platemaker up`: the whole real stack on one machine, supervised."""
