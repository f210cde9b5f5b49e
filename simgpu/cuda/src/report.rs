//! The problems found, until a test reads them. With `SIMGPU_REPORTS` set, they are also written to standard error at
//! once, to help with failures that happen before the test reads them.

use std::sync::LazyLock;

static ALOUD: LazyLock<bool> = LazyLock::new(|| std::env::var_os("SIMGPU_REPORTS").is_some());

/// The most reports kept: more come from one bug that repeats.
const MOST: usize = 200;

#[derive(Debug, Default)]
pub(crate) struct Reports {
    texts: Vec<String>,
    left_out: usize,
}

impl Reports {
    /// Adds `text`, once.
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

    /// Returns all of them, each followed by a NUL.
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
