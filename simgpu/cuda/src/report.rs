//! What was found wrong, until a test reads it. With `SIMGPU_REPORTS` set it is also written to standard error at once, for whoever looks into
//! a failure that comes before the test reads.

use std::sync::LazyLock;

static ALOUD: LazyLock<bool> = LazyLock::new(|| std::env::var_os("SIMGPU_REPORTS").is_some());

/// More than this many are one and the same bug, seen over and over.
const MOST: usize = 200;

#[derive(Debug, Default)]
pub(crate) struct Reports {
    texts: Vec<String>,
    left_out: usize,
}

impl Reports {
    /// Keeps `text`, once.
    pub(crate) fn add(&mut self, text: String) {
        if self.texts.contains(&text) {
            return;
        }
        if *ALOUD {
            eprintln!("simulated GPU: {text}");
        }
        if self.texts.len() == MOST {
            self.left_out += 1;
            return;
        }
        self.texts.push(text);
    }

    /// All of them, each followed by a NUL.
    pub(crate) fn text(&self) -> String {
        let mut all: String = self.texts.iter().map(|text| format!("{text}\0")).collect();
        if self.left_out > 0 {
            all.push_str(&format!("and {} more reports\0", self.left_out));
        }
        all
    }

    pub(crate) fn clear(&mut self) {
        *self = Reports::default();
    }
}
