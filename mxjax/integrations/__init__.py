"""mxjax in other libraries' layers: `mxjax.integrations.qwix` and `mxjax.integrations.haliax`.

Each module imports the library that it is named after, and says what to install if it is missing. Nothing
else in mxjax imports them.
"""
