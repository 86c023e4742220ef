def cases(): return iter(())
