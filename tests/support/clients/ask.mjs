// Node's fetch, with a plain body and with a stream.
const [url, body] = process.argv.slice(2);
for (const streamed of [false, true, true]) {
  const given = streamed
    ? { body: new Blob([body]).stream(), duplex: "half" }
    : { body };
  const response = await fetch(url, { method: "POST", ...given });
  console.log(response.status, await response.text());
}
