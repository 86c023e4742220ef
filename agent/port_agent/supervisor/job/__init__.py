"""One running job: choosing its plan, starting its worker, taking its events, noting how it ended."""
