"""Plans as pictures: `drawing` selects what is shown, `svg` draws one plan, `frontier` several side by side, `page`
makes a page for a browser.
"""
