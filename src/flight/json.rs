//! Just enough JSON to write records with: objects and arrays, one value after another.

use std::fmt::{Display, Write};

/// Text that is being written; commas come by themselves.
#[derive(Debug, Default)]
pub(crate) struct Json {
    text: String,
}

impl Json {
    /// What has been written.
    pub(crate) fn into_text(mut self) -> String {
        self.text.push('\n');
        self.text
    }

    fn separate(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with(['{', '[', ':', '\n']) {
            self.text.push(',');
        }
    }

    /// A key of the object that is open; its value comes next.
    pub(crate) fn key(&mut self, name: &str) -> &mut Self {
        self.text(name);
        self.text.push(':');
        self
    }

    /// A string.
    pub(crate) fn text(&mut self, value: &str) {
        self.separate();
        self.text.push('"');
        for char in value.chars() {
            match char {
                '"' | '\\' => self.text.extend(['\\', char]),
                control if control < ' ' => {
                    let _ = write!(self.text, "\\u{:04x}", u32::from(control));
                }
                other => self.text.push(other),
            }
        }
        self.text.push('"');
    }

    /// A number.
    pub(crate) fn number(&mut self, value: impl Display) {
        self.separate();
        let _ = write!(self.text, "{value}");
    }

    /// `true` or `false`.
    pub(crate) fn boolean(&mut self, value: bool) {
        self.number(value);
    }

    /// A number, or `null`.
    pub(crate) fn number_or_null(&mut self, value: Option<impl Display>) {
        match value {
            Some(value) => self.number(value),
            None => self.number("null"),
        }
    }

    /// A string, or `null`.
    pub(crate) fn text_or_null(&mut self, value: Option<&str>) {
        match value {
            Some(value) => self.text(value),
            None => self.number("null"),
        }
    }

    /// An object with what `inside` writes.
    pub(crate) fn object(&mut self, inside: impl FnOnce(&mut Self)) {
        self.separate();
        self.text.push('{');
        inside(self);
        self.text.push('}');
    }

    /// An array of what `each` writes.
    pub(crate) fn array<T>(&mut self, items: impl IntoIterator<Item = T>, mut each: impl FnMut(&mut Self, T)) {
        self.separate();
        self.text.push('[');
        for item in items {
            each(self, item);
        }
        self.text.push(']');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        let mut json = Json::default();
        json.object(|json| {
            json.key("a \"b\"\n").text("c\\d\u{1}é:");
            json.key("n").number(7);
            json.key("none").number_or_null(None::<u64>);
            json.key("some").text_or_null(Some(""));
            json.key("list").array([1, 2], |json, item| json.object(|json| json.key("x").number(item)));
            json.key("empty").array([], |json, item: u8| json.number(item));
            json.key("is").boolean(true);
        });
        let read: serde_json::Value = serde_json::from_str(&json.into_text()).unwrap();
        let expected = serde_json::json!({
            "a \"b\"\n": "c\\d\u{1}é:", "n": 7, "none": null, "some": "", "list": [{"x": 1}, {"x": 2}], "empty": [], "is": true
        });
        assert_eq!(read, expected);
    }
}
