"""What commands print: progress bars, tables and JSON documents."""
