"""`kvtwin report`: runs that have been saved, as one HTML page that opens offline."""
