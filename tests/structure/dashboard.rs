//! The dashboard for Grafana asks only for metrics and labels that the library writes.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use super::sources::root;

/// Returns the words in a text that consist of letters, digits and underscores.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

/// Returns the names of the samples that `src/metrics/text.rs` writes, with their suffixes.
fn written() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("src/metrics/text.rs")).unwrap();
    let families = text.split("Family(\"").skip(1).filter_map(|rest| {
        let mut parts = rest.split('"');
        let (name, kind) = (parts.next()?, parts.nth(1)?);
        Some(match kind {
            "counter" => format!("{name}_total"),
            "info" => format!("{name}_info"),
            _ => name.to_owned(),
        })
    });
    families.collect()
}

/// Returns all queries of a dashboard.
fn queries(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            let own = ["expr", "query"].into_iter().filter_map(|key| fields.get(key)?.as_str()).map(str::to_owned);
            own.chain(fields.values().flat_map(queries)).collect()
        }
        Value::Array(values) => values.iter().flat_map(queries).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(root().join("docs/grafana/collectives.json")).unwrap()).unwrap();
    let (queries, written) = (queries(&dashboard), written());
    assert!(written.len() >= 5 && queries.len() > 5, "{written:?} {queries:?}");
    let asked: BTreeSet<String> =
        queries.iter().flat_map(|query| words(query)).filter(|word| word.starts_with("collectives_")).map(str::to_owned).collect();
    let (unknown, unused): (Vec<_>, Vec<_>) = (asked.difference(&written).collect(), written.difference(&asked).collect());
    assert!(unknown.is_empty(), "the library writes no {unknown:?}");
    assert!(unused.is_empty(), "no panel shows {unused:?}");
    for query in &queries {
        for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
            assert_eq!(query.matches(open).count(), query.matches(close).count(), "{query}");
        }
    }
    let guide = fs::read_to_string(root().join("docs/src/observing.md")).unwrap();
    for name in written {
        assert!(guide.contains(&format!("`{name}`")), "docs/src/observing.md does not explain {name}");
    }
}

#[test]
fn the_panels_have_places_of_their_own() {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(root().join("docs/grafana/collectives.json")).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let places: BTreeSet<String> = panels.iter().map(|panel| panel["gridPos"].to_string()).collect();
    let numbers: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!((places.len(), numbers.len()), (panels.len(), panels.len()));
}
