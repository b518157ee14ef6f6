// SPDX-License-Identifier: Apache-2.0
// OpenAI's own client for JavaScript against a server: node openai.mjs URL. Prints one line of JSON.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const given = { model: "small", prompt: "def f(x):", max_tokens: 12, temperature: 0 };

const whole = await client.completions.create({ ...given, n: 2, logprobs: 3, echo: true });
const text = whole.choices[0].text.slice(given.prompt.length);
assert.equal(whole.choices.length, 2);
assert.ok(whole.choices.every((choice) => choice.text === given.prompt + text));
assert.equal(whole.choices[0].logprobs.token_logprobs.length, whole.usage.prompt_tokens + 12);
assert.equal(whole.choices[0].logprobs.token_logprobs[0], null);
assert.equal(whole.usage.completion_tokens, 24);

let streamed = "";
let usage = null;
const stream = await client.completions.create({
  ...given, stream: true, stream_options: { include_usage: true }, utio: { depths: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.text ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, 12);

const messages = [{ role: "user", content: "Hello" }];
const chat = { model: "small", messages, max_completion_tokens: 12, temperature: 0 };
const answer = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 });
assert.equal(answer.choices[0].logprobs.content.length, 12);
let said = "";
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  said += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(said, answer.choices[0].message.content);

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.deepEqual(models, ["small"]);

async function refused(body, kind, status, code) {
  await assert.rejects(client.completions.create(body), (error) => {
    assert.ok(error instanceof kind);
    assert.equal(error.status, status);
    assert.equal(error.code, code);
    return true;
  });
}
await refused({ ...given, model: "gpt" }, OpenAI.NotFoundError, 404, "model_not_found");
await refused({ ...given, best_of: 3 }, OpenAI.BadRequestError, 400, "unsupported");
await refused({ ...given, max_tokens: 9999 }, OpenAI.BadRequestError, 400, "context_length_exceeded");

// Leaves after the third chunk.
const left = await client.completions.create({ ...given, max_tokens: 200, stream: true });
let seen = 0;
for await (const _ of left) {
  seen += 1;
  if (seen === 3) break;
}

// More than the queue holds: those that were told to come again do, and all are answered.
const patient = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 30 });
const burst = Array.from({ length: 400 }, (_, seed) =>
  patient.completions.create({ ...given, max_tokens: 4, seed, temperature: 1 }),
);
const ids = new Set((await Promise.all(burst)).map((each) => each.id));
assert.equal(ids.size, 400);

console.log(JSON.stringify({ text, streamed, said, burst: ids.size }));
