"""Rules across keys and sections: each checks a config that matches the schema and yields its problems."""
