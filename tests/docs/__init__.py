"""The documents for people: their commands run, their links lead somewhere, their site builds."""
