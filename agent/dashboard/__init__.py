"""The live page and the parts it shares with the energy report: plain HTML, one vendored chart library, no network."""
