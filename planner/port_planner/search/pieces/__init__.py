"""Into how many pieces chains of operators are cut, chosen together with what happens to each tensor."""
