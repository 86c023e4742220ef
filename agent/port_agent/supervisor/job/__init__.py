"""One running job: choosing its plan, starting its worker, handling its events, and recording how it ended."""
