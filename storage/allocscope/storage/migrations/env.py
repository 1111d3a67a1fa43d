"""Run by Alembic: migrates over the connection that `allocscope.storage.migrate` hands it, in that one's transaction.

To make a new revision's first draft, open a database by the code of before, then compare:
`alembic.autogenerate.produce_migrations(MigrationContext.configure(connection), schema.metadata)`.
"""

from alembic import context

from allocscope.storage.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
