"""What Allocscope promises, by behaviour. Golden files and small recordings lie beside what reads them."""
