"""Parts of `python -m kvfactory.probe_heads`: needles, haystack, trials, scores, the log of trials."""
