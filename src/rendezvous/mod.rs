//! How ranks find each other: stores, URLs, launcher variables.
