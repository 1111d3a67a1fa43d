"""The one command, `allocscope`: starts the services and the demo, and asks the questions.

Its business: arguments, tables and JSON.

Not its business: computing any figure that it prints.
"""
