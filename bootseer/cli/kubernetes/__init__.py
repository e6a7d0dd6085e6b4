"""`bootseer kubernetes`: what Bootseer's own pods run on a cluster."""
