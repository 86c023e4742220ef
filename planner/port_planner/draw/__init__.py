"""Plans as pictures: `drawing` selects the contents, `svg` draws one plan, `frontier` draws several, and `page`
makes a page for a browser.
"""
