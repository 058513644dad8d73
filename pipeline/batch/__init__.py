"""Files of OpenAI's Batch API, answered here: one prefill for the lines that begin alike."""
