//! The device plane of one communicator: which way each call goes, and what it needs.
