//! Links between ranks of different hosts, over TCP.
