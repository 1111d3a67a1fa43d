"""The wire: protocol buffers and the code generated from them (`./dev proto`). Meaning lives in `allocscope.model`."""
