"""PTX front end: text -> module of typed instructions -> control-flow graph. Nothing here executes anything."""
