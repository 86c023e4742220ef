"""One running job: choosing its plan, starting its worker, hearing it, booking what became of it."""
