"""The report room: run logs in, one HTML file or a Chrome trace out.

``page.render`` makes the page, ``chrome_trace.export`` the trace. Nothing here decides or runs
anything, and nothing here reads or writes a file.
"""
