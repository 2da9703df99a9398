//! The state of a table's writers, from the statistics of its memory or of several servers.

use std::time::Duration;

use serde_json::Value;

/// Connected writers of a table, or the time without any.
#[derive(Debug)]
pub struct WritersSeen {
    /// Time without a connected writer; `None` while one is connected.
    pub absence: Option<Duration>,
    /// How the writers are, for the log and the error of a sample that waits.
    pub sentence: String,
}

impl WritersSeen {
    /// `None` where the statistics do not tell: a server is away, the table is gone, or the server is of an earlier release.
    pub fn of(stats: &Value, table: &str) -> Option<Self> {
        let servers: Vec<&Value> = match stats["shards"].as_object() {
            Some(servers) => servers.values().collect(),
            None => vec![stats],
        };
        let tables: Vec<&Value> = servers.iter().map(|stats| &stats["tables"][table]).collect();
        let connected: u64 = tables.iter().filter_map(|of| of["connected_writers"].as_u64()).sum();
        if connected > 0 {
            let writers = if connected == 1 { "1 writer is" } else { &format!("{connected} writers are") };
            let last = match tables.iter().filter_map(|of| of["last_push_s"].as_f64()).min_by(f64::total_cmp) {
                Some(age) => format!("the last push was {} s ago", age.round()),
                None => "none has pushed".to_owned(),
            };
            return Some(WritersSeen { absence: None, sentence: format!("{writers} connected, {last}") });
        }
        let absences = tables.iter().map(|of| Some((of["without_writers_s"].as_f64()?, of["last_writer"].as_str())));
        let absences = absences.collect::<Option<Vec<_>>>()?;
        // A server that has had none says nothing of the others.
        let least = |a: &&(f64, Option<&str>), b: &&(f64, Option<&str>)| a.0.total_cmp(&b.0);
        let last = absences.iter().filter(|(_, name)| name.is_some()).min_by(least);
        let &(absence, last) = last.or_else(|| absences.iter().max_by(least))?;
        let time = absence.round();
        let sentence = match last {
            Some("") => format!("no writer of table {table:?} has been connected for {time} s"),
            Some(name) => {
                format!("no writer of table {table:?} has been connected for {time} s; the last was {name:?}")
            }
            None => format!("table {table:?} has had no writer since it was made, {time} s ago"),
        };
        Some(WritersSeen { absence: Some(Duration::from_secs_f64(absence)), sentence })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sentence(tables: &[Value]) -> String {
        let servers: serde_json::Map<_, _> =
            tables.iter().enumerate().map(|(at, of)| (at.to_string(), json!({"tables": {"t": of}}))).collect();
        WritersSeen::of(&json!({"shards": servers}), "t").map_or_else(String::new, |seen| seen.sentence)
    }

    #[test]
    fn writers_of_several_servers_are_seen_together() {
        let gone = json!({"connected_writers": 0, "without_writers_s": 41.2, "last_writer": "actor 3"});
        let longer = json!({"connected_writers": 0, "without_writers_s": 90.0, "last_writer": "actor 5"});
        let never = json!({"connected_writers": 0, "without_writers_s": 7.0, "last_writer": null});
        let there = json!({
            "connected_writers": 2, "without_writers_s": 0.0, "last_writer": "a", "last_push_s": 40.6
        });
        let fresh = json!({"connected_writers": 1, "without_writers_s": 0.0, "last_push_s": null});
        let for_41 = "no writer of table \"t\" has been connected for 41 s; the last was \"actor 3\"";
        assert_eq!(sentence(&[gone.clone(), longer]), for_41);
        assert_eq!(sentence(&[never.clone(), gone.clone()]), for_41);
        assert_eq!(sentence(&[gone.clone(), Value::Null]), "", "one is away");
        assert_eq!(sentence(&[never]), "table \"t\" has had no writer since it was made, 7 s ago");
        assert_eq!(sentence(&[gone.clone(), there]), "2 writers are connected, the last push was 41 s ago");
        assert_eq!(sentence(&[fresh, gone]), "1 writer is connected, none has pushed");
        // Of an earlier release, or a table that is gone.
        assert_eq!(sentence(&[json!({"items": 3})]), "");
        assert_eq!(sentence(&[Value::Null]), "");
    }
}
