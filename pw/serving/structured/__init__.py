"""What an answer must look like: formats, schemas, grammars tried in a process of their own."""
