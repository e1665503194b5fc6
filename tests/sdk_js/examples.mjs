// The documented examples of OpenAI's JavaScript SDK, as people paste them, with what must come of each.
//
// Each exported function is one example and one test: it gets a client whose base URL is Laya's. `run.mjs` calls them.

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const model = 'smollm2';
const hello = [{ role: 'user', content: 'Say hello.' }];
const few = { model, temperature: 0, max_tokens: 8 };
const Person = z.object({ age: z.number().int() });
const City = z.object({ city: z.enum(['Paris', 'Rome']) });
const weather = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'The weather in a city.',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  },
};
// small as it is, the model repeats a call that it is shown
const callWanted = [
  { role: 'system', content: 'You call functions.' },
  {
    role: 'user',
    content:
      'Repeat exactly this text and nothing else:\n<tool_call>\n' +
      '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
  },
];

async function textOf(stream) {
  let text = '';
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? '';
  return text;
}

export async function chat(client) {
  const completion = await client.chat.completions.create({ ...few, messages: hello });
  assert.equal(completion.object, 'chat.completion');
  assert.equal(completion.choices[0].message.role, 'assistant');
  assert.ok(completion.choices[0].message.content);
  assert.equal(completion.usage.total_tokens, completion.usage.prompt_tokens + completion.usage.completion_tokens);
  assert.ok(completion._request_id);
}

export async function chat_streamed(client) {
  const whole = await client.chat.completions.create({ ...few, messages: hello });
  const stream = await client.chat.completions.create({ ...few, messages: hello, stream: true });
  assert.equal(await textOf(stream), whole.choices[0].message.content);
}

export async function chat_stream_helper(client) {
  const pieces = [];
  const runner = client.chat.completions
    .stream({ ...few, messages: hello, stream_options: { include_usage: true } })
    .on('content', (delta) => pieces.push(delta));
  const final = await runner.finalChatCompletion();
  assert.equal(pieces.join(''), final.choices[0].message.content);
  assert.equal((await runner.totalUsage()).completion_tokens, 8);
}

export async function chat_stream_that_is_broken_off(client) {
  const stream = await client.chat.completions.create({ model, messages: hello, max_tokens: 1000, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break; // closes the connection
  }
  await idle(client);
}

export async function chat_tools(client) {
  const fields = { ...few, max_tokens: 40, messages: callWanted, tools: [weather] };
  const completion = await client.chat.completions.create(fields);
  assert.equal(completion.choices[0].finish_reason, 'tool_calls');
  const [call] = completion.choices[0].message.tool_calls;
  assert.equal(call.function.name, 'get_weather');
  assert.deepEqual(JSON.parse(call.function.arguments), { city: 'Paris' });
  const answered = await client.chat.completions.create({
    ...few,
    messages: [
      ...callWanted,
      completion.choices[0].message,
      { role: 'tool', tool_call_id: call.id, content: '21 degrees' },
    ],
    tools: [weather],
  });
  assert.ok(answered.usage.prompt_tokens > completion.usage.prompt_tokens + completion.usage.completion_tokens);
}

export async function chat_tools_streamed(client) {
  const stream = await client.chat.completions.create({
    ...few,
    max_tokens: 40,
    messages: callWanted,
    tools: [weather],
    stream: true,
  });
  const calls = {}; // put together by their index, as the documentation does
  for await (const chunk of stream) {
    for (const delta of chunk.choices[0]?.delta?.tool_calls ?? []) {
      calls[delta.index] ??= delta;
      if (calls[delta.index] !== delta) calls[delta.index].function.arguments += delta.function.arguments;
    }
  }
  assert.deepEqual(Object.keys(calls), ['0']);
  assert.equal(calls[0].function.name, 'get_weather');
  assert.ok(calls[0].id);
  assert.deepEqual(JSON.parse(calls[0].function.arguments), { city: 'Paris' });
}

function runnable(asked) {
  const called = ({ city }) => {
    asked.push(city);
    return '21 degrees, sunny';
  };
  const parameters = weather.function.parameters;
  return { type: 'function', function: { ...weather.function, parameters, function: called, parse: JSON.parse } };
}

export async function chat_run_tools(client) {
  const asked = [];
  const runner = client.chat.completions.runTools(
    { ...few, max_tokens: 40, messages: callWanted, tools: [runnable(asked)] },
    { maxChatCompletions: 2 },
  );
  const messages = [];
  runner.on('message', (message) => messages.push(message.role));
  await runner.done();
  assert.equal(asked[0], 'Paris');
  assert.deepEqual(messages.slice(0, 2), ['assistant', 'tool']);
  assert.equal((await runner.allChatCompletions()).length, 2);
}

export async function chat_run_tools_streamed(client) {
  const asked = [];
  const runner = client.chat.completions.runTools({
    ...few,
    max_tokens: 60,
    messages: [{ role: 'user', content: 'What is the weather in Rome?' }],
    tools: [runnable(asked)],
    tool_choice: { type: 'function', function: { name: 'get_weather' } },
    stream: true,
  });
  const result = await runner.finalFunctionToolCallResult();
  assert.equal(result, '21 degrees, sunny');
  assert.equal(asked.length, 1);
}

export async function chat_zod_function(client) {
  const completion = await client.chat.completions.parse({
    ...few,
    max_tokens: 60,
    messages: [{ role: 'user', content: 'What is the weather in Paris?' }],
    tools: [zodFunction({ name: 'get_weather', parameters: City })],
    tool_choice: 'required',
  });
  assert.ok(City.parse(completion.choices[0].message.tool_calls[0].function.parsed_arguments));
}

export async function chat_zod_response_format(client) {
  const completion = await client.chat.completions.parse({
    ...few,
    max_tokens: 40,
    messages: [{ role: 'user', content: 'Give me a person.' }],
    response_format: zodResponseFormat(Person, 'person'),
  });
  assert.ok(Number.isInteger(completion.choices[0].message.parsed.age));
}

export async function chat_json_schema(client) {
  const schema = {
    type: 'object',
    properties: { age: { type: 'integer' } },
    required: ['age'],
    additionalProperties: false,
  };
  const completion = await client.chat.completions.create({
    ...few,
    max_tokens: 40,
    messages: [{ role: 'user', content: 'Give me a person.' }],
    response_format: { type: 'json_schema', json_schema: { name: 'person', strict: true, schema } },
  });
  assert.deepEqual(Object.keys(JSON.parse(completion.choices[0].message.content)), ['age']);
}

export async function chat_logprobs(client) {
  const completion = await client.chat.completions.create({
    ...few,
    max_tokens: 2,
    messages: hello,
    logprobs: true,
    top_logprobs: 2,
  });
  const [choice] = completion.choices;
  assert.equal(choice.logprobs.content.map(({ token }) => token).join(''), choice.message.content);
  assert.equal(choice.logprobs.content[0].top_logprobs.length, 2);
}

export async function completions(client) {
  const completion = await client.completions.create({ ...few, prompt: 'One, two, three,' });
  assert.equal(completion.object, 'text_completion');
  assert.ok(completion.choices[0].text);
}

export async function embeddings(client) {
  const input = ['A cat sat on the mat.', 'A dog sat on the mat.'];
  const answer = await client.embeddings.create({ model: 'emb', input }); // asked for and read as base64
  const floats = await client.embeddings.create({ model: 'emb', input, encoding_format: 'float' });
  assert.deepEqual(answer.data.map(({ index }) => index), [0, 1]);
  for (const [at, { embedding }] of answer.data.entries()) {
    assert.equal(embedding.length, 576);
    embedding.forEach((value, i) => assert.ok(Math.abs(value - floats.data[at].embedding[i]) < 1e-6));
  }
}

const short = { model, temperature: 0, max_output_tokens: 8 };

export async function responses(client) {
  const response = await client.responses.create({ ...short, instructions: 'Be brief.', input: 'Say hello.' });
  assert.ok(response.output_text);
  assert.equal(response.object, 'response');
  const kept = await client.responses.retrieve(response.id);
  assert.equal(kept.output_text, response.output_text);
  const items = await client.responses.inputItems.list(response.id);
  assert.equal(items.data[0].content[0].text, 'Say hello.');
  await client.responses.delete(response.id);
  await assert.rejects(client.responses.retrieve(response.id), OpenAI.NotFoundError);
}

export async function responses_previous_response_id(client) {
  const first = await client.responses.create({ ...short, input: 'My name is Ann. ' + 'I like trees. '.repeat(10) });
  const second = await client.responses.create({
    ...short,
    input: 'What is my name?',
    previous_response_id: first.id,
  });
  assert.equal(second.previous_response_id, first.id);
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens);
}

export async function responses_streamed(client) {
  const stream = await client.responses.create({ ...short, input: 'Count to three.', stream: true });
  const events = [];
  for await (const event of stream) events.push(event);
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal(events[0].type, 'response.created');
  const deltas = events.filter((event) => event.type === 'response.output_text.delta').map((event) => event.delta);
  assert.equal(deltas.join(''), events.at(-1).response.output[0].content[0].text);
}

export async function responses_stream_helper(client) {
  const stream = client.responses.stream({
    ...short,
    max_output_tokens: 40,
    input: 'Give me a person.',
    text: { format: zodTextFormat(Person, 'person') },
  });
  const final = await stream.finalResponse();
  assert.equal(final.status, 'completed');
  assert.ok(Number.isInteger(final.output_parsed.age));
}

export async function responses_tools(client) {
  const response = await client.responses.parse({
    ...short,
    max_output_tokens: 60,
    input: 'What is the weather in Paris?',
    tools: [zodResponsesFunction({ name: 'get_weather', parameters: City })],
    tool_choice: 'required',
  });
  const [call] = response.output;
  assert.equal(call.type, 'function_call');
  const answered = await client.responses.create({
    ...short,
    previous_response_id: response.id,
    input: [{ type: 'function_call_output', call_id: call.call_id, output: '21 degrees' }],
  });
  assert.ok(answered.usage.input_tokens > 0);
  assert.ok(City.parse(call.parsed_arguments));
}

export async function models(client) {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  const one = await client.models.retrieve(model);
  assert.ok(ids.includes(one.id));
  assert.ok(one.context_length > 0);
}

export async function errors(client) {
  const missing = await client.chat.completions.create({ ...few, model: 'smolm2', messages: hello }).catch((e) => e);
  assert.ok(missing instanceof OpenAI.NotFoundError);
  assert.deepEqual([missing.status, missing.code, missing.param], [404, 'model_not_found', 'model']);
  assert.ok(missing.requestID);
  await assert.rejects(
    client.chat.completions.create({ ...few, messages: hello, temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === 'temperature',
  );
  const long = [{ role: 'user', content: 'tree '.repeat(5000) }];
  for (const stream of [false, true]) {
    const refused = await client.chat.completions.create({ ...few, messages: long, stream }).catch((e) => e);
    assert.equal(refused.code, 'context_length_exceeded');
  }
  await assert.rejects(client.responses.retrieve('resp_none'), OpenAI.NotFoundError);
  await assert.rejects(client.embeddings.create({ model, input: 'x' }), OpenAI.InternalServerError); // 501: not by this
}

export async function raw_response(client) {
  const { data, response } = await client.chat.completions.create({ ...few, messages: hello }).withResponse();
  assert.equal(response.headers.get('x-laya-model'), data.model);
  assert.equal(response.headers.get('x-request-id'), data._request_id);
}

export async function timeout(client) {
  const long = { model, messages: hello, max_tokens: 1000, ignore_eos: true };
  const request = client.chat.completions.create(long, { timeout: 200 });
  await assert.rejects(request, OpenAI.APIConnectionTimeoutError);
  await idle(client);
}

/** Until this server runs nothing: whoever left has freed its sequence. */
async function idle(client) {
  for (let tries = 0; tries < 100; tries++) {
    if ((await client.get('/requests')).data.length === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  assert.fail('a request whose client left still runs after 10 s');
}
