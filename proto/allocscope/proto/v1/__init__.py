"""Version 1 of the wire. Generated modules import on protobuf 5.29 and later and on grpcio 1.66.2 and later."""
