"""Plans as pictures: `drawing` says what is shown of one, `svg` draws it, `frontier` draws several beside each other, `page` is for a browser."""
